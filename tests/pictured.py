"""A tokenizer, pictures and rows for tests of vision models."""

import io
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import PIL.Image
import tokenizers
import transformers

from bapo_jax.data import gallery, tokenizer
from bapo_jax.data import prompts as prompts_lib
from bapo_jax.data.gallery import Gallery
from bapo_jax.data.row import Row
from bapo_jax.data.tokenizer import Tokenizer
from bapo_jax.models.transformer import ModelSpec
from bapo_jax.models.vision.spec import VisionSpec
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
SEEING = ModelSpec(
  vocab=24,
  width=16,
  layers=2,
  heads=4,
  kv_heads=2,
  head_width=8,
  ffn=24,
  mrope=(1, 2, 1),
  vision=VisionSpec(
    width=16,
    layers=2,
    heads=2,
    ffn=20,
    out=16,
    full_layers=(1,),
    image_token=5,
    patch=4,
    window=16,
    least_pixels=64,
    most_pixels=1024,
  ),
)
SIZES = ((16, 24),), ((8, 16), (24, 8)), (), ((32, 16),), ((8, 8),), ()


class Pictured(NamedTuple):
  """Problems with pictures of noise, some without any."""

  prompts: Prompts
  gallery: Gallery


def problems(
  sizes: Sequence[Sequence[tuple[int, int]]] = SIZES,
  spec: ModelSpec = SEEING,
  seed: int = 0,
) -> Pictured:
  """Returns a problem per entry, with pictures of these heights and widths."""
  v = spec.vision
  rng = np.random.default_rng(seed)
  rows = []
  for each in sizes:
    words = rng.choice(['Find', 'x', 'and'], rng.integers(1, 4)).tolist()
    files = tuple(png(*size, seed=int(rng.integers(1000))) for size in each)
    text = ' '.join(words + ['<image>'] * len(each))
    rows.append(Row(text, '7', pictures=files))
  encoded = prompts_lib.encode(reader(), rows, v)
  length_P = np.asarray([len(each.tokens) for each in encoded], np.int32)
  tokens_PT = np.zeros((len(rows), max(length_P)), np.int32)
  for p, each in enumerate(encoded):
    tokens_PT[p, : length_P[p]] = each.tokens
  room = gallery.capacity([each.grids for each in encoded], v)
  prompts = Prompts(np.arange(len(rows), dtype=np.int32), tokens_PT, length_P)
  return Pictured(prompts, Gallery(rows, v, room))


# A tiny run on drawn pictures; see runs.TINY.
DRAWN = {
  'problems.source': 'drawn',
  'problems.test_source': 'drawn',
  'problems.drawn.shown': 2,
  'problems.drawn.terms': 1,
  'prompts.max_prompt_tokens': 26,
  'prompts.count': 4,
  'sampler.max_num_seqs': 8,
  'sampler.prefill_batch_size': 8,
  'model.tower.layers': 2,
  'model.tower.width': 8,
  'model.tower.ffn': 8,
  'problems.test': 4,
  'sampler.max_new_tokens': 8,
  'sft.clean': 2,
}

# The embedded policy's reader, and a tower of one layer for its token of pictures.
READER = tokenizer.load('characters', '{problem}\n')
ONE_LAYER = VisionSpec(
  width=16,
  layers=1,
  heads=2,
  ffn=16,
  out=16,
  full_layers=(0,),
  image_token=tokenizer.CHARACTERS.index('<image>'),
)
