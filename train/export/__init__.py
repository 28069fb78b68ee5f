"""A run's model as a folder that transformers and vLLM load: `bytescope export RUN OUT`.

Start at command.py; saved_run.py reads a run directory, config_json.py turns `config.model` into config.json,
tensors.py our parameters into theirs, safetensors_files.py writes those, tokenizer_files.py what text needs.
"""
