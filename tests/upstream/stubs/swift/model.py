"""How ms-swift 4.6.0 loads a model; `experts_impl` is its option `--experts_impl`."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def get_model_processor(model_id_or_path: str, *, torch_dtype=None, experts_impl: str | None = None):
    config = AutoConfig.from_pretrained(model_id_or_path)
    model_kwargs = {"dtype": torch_dtype}
    if experts_impl is not None:
        model_kwargs["experts_implementation"] = experts_impl
    model = AutoModelForCausalLM.from_pretrained(model_id_or_path, config=config, **model_kwargs)
    return model, AutoTokenizer.from_pretrained(model_id_or_path)
