"""A run's model as a folder that transformers and vLLM load: `bytescope export RUN OUT`.

Start at train/commands/export_command.py; config_json.py turns `config.model` into config.json, tensors.py our
parameters into the tensors of the family, model_folder.py writes them, tokenizer_files.py copies what text needs.
"""
