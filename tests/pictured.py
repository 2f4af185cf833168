"""A tokenizer, pictures and rows for tests of vision models."""

import dataclasses
import io
import pathlib
from typing import NamedTuple

import making
import numpy as np
import PIL.Image
import tokenizers
import transformers

from bapo_jax.data import gallery, tokenizer
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.data.gallery import Gallery
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models import layers
from bapo_jax.models.vision import sequence
from bapo_jax.types import Prompts

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
  """Returns a tokenizer of WORDS; <image_pad> is token 5."""
  vocab = {word: i for i, word in enumerate(WORDS)}
  made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token='<unk>'))
  made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  made.add_special_tokens([*SPECIAL, '<image_pad>'])
  backend = transformers.PreTrainedTokenizerFast(
    tokenizer_object=made, unk_token='<unk>', eos_token='<eos>', chat_template=chat
  )
  return Tokenizer(backend, (1,), template)


def png(height: int, width: int, seed: int = 0) -> bytes:
  """Returns the bytes of a PNG of noise."""
  pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
  file = io.BytesIO()
  PIL.Image.fromarray(pixels).save(file, 'PNG')
  return file.getvalue()


# A model that sees: patches of 4 pixels, windows of 16 of them, both kinds of layers.
VISION = dataclasses.replace(
  making.SEEING.vision,
  width=16,
  heads=2,
  ffn=20,
  patch=4,
  window=16,
  least_pixels=64,
  most_pixels=1024,
)
SEEING = dataclasses.replace(
  making.SEEING,
  vocab=24,
  kv_heads=2,
  head_width=8,
  ffn=24,
  mrope=(1, 2, 1),
  vision=VISION,
)
SIZES = ((16, 24),), ((8, 16), (24, 8)), (), ((32, 16),), ((8, 8),), ()


def forward(params, tokens_BT, pictures, spec):
  """Computes the final hidden states [B, T, D] of whole rows with pictures."""
  x_BTD, turn, _ = sequence.embed(params, tokens_BT, pictures, spec)
  return layers.through(params, x_BTD, turn, spec)[0]


class Pictured(NamedTuple):
  """Problems with pictures of noise, some without any."""

  prompts: Prompts
  gallery: Gallery


def problems() -> Pictured:
  """Returns a problem per entry of SIZES, with pictures of these heights and widths."""
  rng, rows = np.random.default_rng(0), []
  for sizes in SIZES:
    words = rng.choice(['Find', 'x', 'and'], rng.integers(1, 4)).tolist()
    files = tuple(png(*size, seed=int(rng.integers(1000))) for size in sizes)
    text = ' '.join(words + ['<image>'] * len(sizes))
    rows.append(Row(text, '7', pictures=files))
  encoded = prompts_lib.encode(reader(), rows, VISION)
  length_P = np.asarray([len(prompt.tokens) for prompt in encoded], np.int32)
  tokens_PT = np.zeros((len(rows), max(length_P)), np.int32)
  for p, prompt in enumerate(encoded):
    tokens_PT[p, : length_P[p]] = prompt.tokens
  room = gallery.capacity([prompt.grids for prompt in encoded], VISION)
  prompts = Prompts(np.arange(len(rows), dtype=np.int32), tokens_PT, length_P)
  return Pictured(prompts, Gallery(rows, VISION, room))


# A tiny run on drawn pictures; see runs.TINY.
PICTURES = f'{pathlib.Path(__file__).parents[1]}/examples/drawn.py:drawn'
DRAWN = {
  'problems.source': PICTURES,
  'problems.test_source': PICTURES,
  'problems.custom.shown': 2,
  'problems.custom.terms': 1,
  'problems.custom.train': 24,
  'problems.custom.test': 4,
  'prompts.max_prompt_tokens': 26,
  'prompts.count': 4,
  'sampler.max_num_seqs': 8,
  'sampler.prefill_batch_size': 8,
  'sft.tower.layers': 2,
  'sft.tower.width': 8,
  'sft.tower.ffn': 8,
  'sampler.max_new_tokens': 8,
  'sft.clean': 2,
}

# The embedded policy's reader, and a tower of one layer for its token of pictures.
READER = tokenizer.load(tokenizer.EMBEDDED, '{problem}\n')
ONE_LAYER = dataclasses.replace(
  making.SEEING.vision,
  width=16,
  layers=1,
  heads=2,
  ffn=16,
  full_layers=(0,),
  image_token=making.CHARACTERS.index('<image>'),
)
