"""How LLaMA-Factory 0.9.6 loads a model: it has no option for experts."""

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def load_tokenizer(model_args) -> dict:
    return {"tokenizer": AutoTokenizer.from_pretrained(model_args.model_name_or_path), "processor": None}


def load_model(tokenizer, model_args, finetuning_args, is_trainable=False, add_valuehead=False):
    config = AutoConfig.from_pretrained(model_args.model_name_or_path)
    init_kwargs = {"config": config, "torch_dtype": "auto"}
    init_kwargs["pretrained_model_name_or_path"] = model_args.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(**init_kwargs)
    return model.train(is_trainable)
