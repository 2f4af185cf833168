"""Tiny Hugging Face models: random weights, and tokenizers trained for them."""

import json
import pathlib

import making
import tokenizers
import transformers

from bapo_jax.models import transformer
from bapo_jax.models.hf import config as hf_config
from bapo_jax.models.hf import weights as hf_weights

# The options by which Qwen2, Qwen3 and Llama differ.
OWN = {
  'qwen2': {'architectures': ['Qwen2ForCausalLM'], 'tie_word_embeddings': True},
  'qwen3': {'architectures': ['Qwen3ForCausalLM'], 'head_dim': 16},
  'llama': {'architectures': ['LlamaForCausalLM'], 'attention_bias': False},
}
SIZES = making.SIZES | {'num_attention_heads': 2, 'num_key_value_heads': 1}
SIZES |= {'max_position_embeddings': 256, 'rms_norm_eps': 1e-5}
CHAT = (
  "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
  '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)
ENDS = '<|end|>'
SPECIAL = [ENDS, '<|user|>', '<|system|>', '<|assistant|>']


def problems(n: int, start: int = 0) -> list[dict[str, str]]:
  """Returns n different sums."""
  pairs = [divmod(i, 10) for i in range(start, start + n)]
  return [{'problem': f'What is {a} + {b}?', 'answer': str(a + b)} for a, b in pairs]


def tokenizer(kind: str, chat: str | None = CHAT, end: str | None = ENDS):
  """Trains a byte-level BPE tokenizer, or Unigram with visible blanks for a Llama."""
  texts = [row['problem'] + row['answer'] for row in problems(100)] + [
    'Please reason step by step, and put your final answer within \\boxed{}.\n'
  ]
  if kind == 'llama':
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    backend.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
      vocab_size=120, special_tokens=['<unk>', *SPECIAL], unk_token='<unk>'
    )
  else:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
      vocab_size=300, special_tokens=SPECIAL, initial_alphabet=alphabet
    )
  backend.train_from_iterator(texts, trainer)
  return transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend,
    eos_token=end,
    unk_token='<unk>' if kind == 'llama' else None,
    chat_template=chat,
  )


def model(path: pathlib.Path, kind: str, chat: str | None = CHAT, **config) -> str:
  """Writes a directory as `save_pretrained` does; returns its path.

  Args:
    kind: a key of OWN. chat: the chat template, None for a base model.
    config: other options of its config.json.
  """
  path.mkdir()
  backend = tokenizer(kind, chat)
  backend.save_pretrained(path)
  # A multiple of 8 beyond the last token, as published models have.
  vocab = {'vocab_size': -(-len(backend) // 8) * 8 + 8}
  values = {'model_type': kind} | SIZES | OWN[kind] | vocab | config
  (path / 'config.json').write_text(json.dumps(values))
  spec = hf_config.read_spec(str(path), 'float32')
  flat = transformer.flatten(making.params(spec))
  hf_weights.save(str(path), flat.__getitem__, spec, 'float32')
  return str(path)
