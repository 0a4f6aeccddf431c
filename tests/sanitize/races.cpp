// The loops of csrc/ under ThreadSanitizer; `make sanitize` builds and runs this file.
//
// ThreadSanitizer does not see how GNU's OpenMP synchronises, and would report races that are none.  csrc/system.h looks
// up its two entry points by name, so this program defines them on std::thread, which ThreadSanitizer knows.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include "../../csrc/glu.h"
#include "../../csrc/rows.h"
#include "../../csrc/system.h"

extern "C" void omp_set_num_threads(int) {}

extern "C" void GOMP_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
  std::vector<std::thread> others;
  for (unsigned i = 1; i < threads; ++i) others.emplace_back(body, data);
  body(data);
  for (std::thread& thread : others) thread.join();
}

static void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "wrong: %s\n", what);
  std::exit(1);
}

constexpr int64_t T = 61, K = 3, R = T * K, E = 40, H = 300;

// The outputs of every loop, by so many threads.
static std::vector<std::vector<float>> outputs(int threads) {
  std::vector<float> x(T * H), rows(R * H), weights(R), scores(T * E), values(T * K), picked(R * H), sums(T * H);
  std::vector<float> tokens(T * H), dots(R), columns(H), z(R * 2 * H), a(R * H), dz(R * 2 * H), wa(R * H), dw(R);
  std::vector<int64_t> ids(T * K);
  std::vector<int32_t> order(R), rank(R), sizes(E);
  for (size_t i = 0; i < x.size(); ++i) x[i] = static_cast<float>(i % 17) - 8;
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 23) / 8 - 1;
  for (size_t i = 0; i < z.size(); ++i) z[i] = static_cast<float>(i % 29) / 8 - 2;
  for (size_t i = 0; i < scores.size(); ++i) scores[i] = static_cast<float>(i * 7919 % 1009);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = static_cast<float>(i % 5) / 4;
  const auto loop = [=](int64_t n, const auto& fn) { host::parallel_for(n, 1, threads, fn); };
  loop(T, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> keys(E);
    host::topk(scores.data(), values.data(), ids.data(), keys.data(), begin, end, E, K);
  });
  require(host::sort_by_expert(ids.data(), order.data(), rank.data(), sizes.data(), R, E) < E, "an expert's id");
  loop(R, [&](int64_t begin, int64_t end) {
    host::gather(x.data(), order.data(), weights.data(), picked.data(), begin, end, H, K);
  });
  loop(T, [&](int64_t begin, int64_t end) {
    host::unpermute(rows.data(), rank.data(), weights.data(), tokens.data(), begin, end, H, K);
    host::row_dots(rows.data(), x.data(), rank.data(), dots.data(), begin, end, H, K);
  });
  loop(H, [&](int64_t begin, int64_t end) {
    host::column_sums(rows.data(), order.data(), weights.data(), columns.data(), R, begin, end, H);
  });
  const host::GluGradient<float> gradient{rows.data(),    z.data(),  dz.data(), order.data(),
                                          weights.data(), wa.data(), dw.data()};
  loop(R, [&](int64_t begin, int64_t end) {
    host::glu<host::Silu>(host::Layout::pairs, z.data(), a.data(), begin, end, H);
    host::glu_gradient<host::Gelu, true>(host::Layout::halves, gradient, begin, end, H);
  });
  for (int32_t i = 0; i < R; ++i) order[i] = i;
  const auto border = [](int64_t r) { return r / K * K; };  // rows of a token stay in one part
  loop(R, [&](int64_t begin, int64_t end) {
    host::accumulate(rows.data(), order.data(), weights.data(), sums.data(), border(begin),
                     end == R ? R : border(end), H, K);
  });
  return {values, picked, tokens, dots, columns, a, dz, wa, dw, sums};
}

int main() {
  const auto want = outputs(1);
  for (int threads : {2, 3, 7}) require(outputs(threads) == want, "results depend on the number of threads");
  // every thread throws; the caller catches one exception, and nothing else runs by then
  std::atomic<int> running{0};
  bool caught = false;
  try {
    host::in_threads(4, [&] {
      ++running;
      throw std::bad_alloc();
    });
  } catch (const std::bad_alloc&) {
    caught = true;
  }
  require(caught && running == 4, "an exception in a thread does not reach the caller");
  std::puts("no races");
}
