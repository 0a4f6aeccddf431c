"""AITER's operators, each in the module where AITER has it."""
