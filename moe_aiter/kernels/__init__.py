"""The ops, by wing.  A wing imports only from wings above its own line.

base       what every kernel file uses: checks, launching, tiles, activations, 8-bit formats, C++
rows       sort tokens by expert, choose experts, route, permute and unpermute rows, sum them
quantize   quantise rows, in the layouts and blocks that 8-bit products need
sparse     products with block-sparse matrices and with matrices of single entries
hopper     Gluon kernels for sm_90 of the ops of other wings; only launchers are called from outside
grouped    products of groups and segments of rows: gmm, tgmm, masked_gmm, segment_gmm, grouped_gemm
dense      single and batched products, scaled and tuned ones, the mask of attention
experts    both projections of all experts: up, down, glu, in 8 bits, with adapters, on a CPU
"""
