"""`bytescope export RUN OUT`: writes the model of a run as a folder that transformers and vLLM load.

Start at train/commands/export_command.py. config_json.py turns `config.model` into config.json, tensors.py turns our
parameters into the tensors of the Hugging Face family, model_folder.py writes them, and tokenizer_files.py copies the
tokenizer and chat template.
"""
