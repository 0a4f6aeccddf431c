"""Other libraries' names, at their own paths behind this one: no kernels and no maths, only translation."""
