"""AITER's operators, each in the module of the same name as in AITER."""
