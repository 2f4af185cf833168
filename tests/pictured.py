"""A tokenizer, pictures and rows for tests of models that see."""

import io

import numpy as np
import PIL.Image
import tokenizers
import transformers

from bapo_jax.data.tokenizer import Tokenizer

# As Qwen2.5-VL's own writes one message: texts, and pictures between two marks.
CHAT = (
  "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}"
  "{{ m['content'] }}{% else %}{% for c in m['content'] %}"
  "{% if c['type'] == 'image' %}<s><image_pad><e>{% else %}{{ c['text'] }}{% endif %}"
  '{% endfor %}{% endif %}{% endfor %}[assistant]'
)
SPECIAL = ['<s>', '<e>', '[user]', '[system]', '[assistant]']
WORDS = ['<unk>', '<eos>', 'Find', 'x', 'and', '<image_pad>', *SPECIAL]


def reader(template: str = 'chat:{problem}', chat: str = CHAT) -> Tokenizer:
  """A tokenizer of WORDS; <image_pad> is token 5."""
  vocab = {word: i for i, word in enumerate(WORDS)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token='<unk>'))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens([*SPECIAL, '<image_pad>'])
  backend = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, unk_token='<unk>', eos_token='<eos>', chat_template=chat
  )
  return Tokenizer(backend, (1,), template)


def png(height: int, width: int, seed: int = 0) -> bytes:
  """The file of a picture of noise."""
  pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()
