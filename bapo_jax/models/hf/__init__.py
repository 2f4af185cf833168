"""Reads and writes Hugging Face model directories: config.json, weights, adapters.
Read directory, config, safetensors_io, weights, then peft.
"""
