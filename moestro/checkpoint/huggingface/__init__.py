"""Models as Hugging Face folders: config.json, tokenizer files and safetensors, in and out, one tensor at a time."""
