"""The names that other libraries document, at their import paths behind one prefix; translation only."""
