"""Other packages' functions under their own import paths.  These modules only translate calls."""
