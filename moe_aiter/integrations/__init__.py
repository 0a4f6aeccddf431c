"""moe_aiter in other packages: transformers, PEFT, torchtitan.  Each of these packages is optional."""
