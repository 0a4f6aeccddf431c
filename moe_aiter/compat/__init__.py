"""Other packages' names at their own import paths.  Translation only: nothing is computed here."""
