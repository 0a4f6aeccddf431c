"""Other people's training code on these kernels.  Each package that a module here is for stays optional."""
