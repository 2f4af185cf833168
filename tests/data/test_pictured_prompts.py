"""A prompt has as many tokens for a picture as the tower makes of it."""

import dataclasses

import jax
import making
import numpy as np
import pytest
from pictured import WORDS, png, reader

from bapo_jax.data import pictured_prompts, pictures
from bapo_jax.data.pictured_files import PicturedRow
from bapo_jax.data.row import Row
from bapo_jax.models.vision import sequence

V = making.SEEING.vision


def row(problem, *sizes, system=''):
  return PicturedRow(Row(problem, '1', '', system), tuple(png(*size) for size in sizes))


def words(prompt):
  return [WORDS[i] for i in prompt.tokens]


def test_pictures_stand_where_the_template_puts_them():
  # 56 x 84 pixels are 2 x 3 merged patches of 28.
  found = pictured_prompts.encode(
    reader(),
    [
      row('<image>Find x', (56, 84)),
      row('Find <image> and <image>', (56, 56), (56, 84), system='x'),
      row('Find x'),
    ],
    V,
  )
  pad = '<image_pad>'
  one, two, three = map(words, found)
  assert one == ['[user]', '<s>', *[pad] * 6, '<e>', 'Find', 'x', '[assistant]']
  assert two == [
    *('[system]', 'x', '[user]', 'Find', '<s>', *[pad] * 4, '<e>', 'and'),
    *('<s>', *[pad] * 6, '<e>', '[assistant]'),
  ]
  assert three == ['[user]', 'Find', 'x', '[assistant]']
  assert [each.grids for each in found] == [((4, 6),), ((4, 4), (4, 6)), ()]


def test_without_a_chat_template():
  (found,) = pictured_prompts.encode(
    reader('{problem} and'), [row('<image>Find x', (56, 56))], V
  )
  assert words(found) == [*['<image_pad>'] * 4, 'Find', 'x', 'and']


def test_the_message_of_a_chat_in_parts():
  text, image = {'type': 'text', 'text': 'Q\n'}, {'type': 'image'}
  assert pictured_prompts.parts('Q') == 'Q'
  assert pictured_prompts.parts('<image>') == [image]
  assert pictured_prompts.parts('Q\n<image><image>Q\n') == [text, image, image, text]


def test_every_patch_has_its_token_and_every_token_its_patch():
  # By the very function that the model places patches with.
  rows = [
    row('<image>Find x', (70, 90)),
    row('Find x'),
    row('<image> and <image>', (30, 200), (56, 56)),
  ]
  prompts = pictured_prompts.encode(reader(), rows, V)
  pixels_PZE, grid_PI2, _ = pictured_prompts.pixels(rows, V, 64, 2, 9)
  width = max(len(each.tokens) for each in prompts)
  tokens_PT = np.zeros((3, width), np.int32)
  for p, each in enumerate(prompts):
    tokens_PT[p, : len(each.tokens)] = each.tokens
    assert [tuple(grid) for grid in grid_PI2[p] if grid.any()] == list(each.grids)
  at = jax.jit(sequence.place, static_argnums=2)(tokens_PT, grid_PI2, V)
  for p, (_, files) in enumerate(rows):
    merged = at.merged_BT[p][tokens_PT[p] == V.image_token]
    patches = [pictures.patches(pictures.read(data), V).pixels_ZE for data in files]
    n = sum(map(len, patches))
    assert merged.tolist() == list(range(n // V.merge**2))
    assert not pixels_PZE[p, n:].any()
    if n:
      np.testing.assert_array_equal(pixels_PZE[p, :n], np.concatenate(patches))


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (
      lambda: pictured_prompts.encode(
        reader(), [row('<image><image_pad>', (56, 56))], V
      ),
      'has 2 <image_pad> for 1 pictures; take <image_pad> out of the problem',
    ),
    (
      lambda: pictured_prompts.encode(
        reader(chat="{{ messages[0]['content'][1]['text'] }}"),
        [row('<image>Find', (56, 56))],
        V,
      ),
      'has 0 <image_pad> for 1 pictures; take <image_pad> out of the problem, or',
    ),
    (
      lambda: pictured_prompts.encode(
        reader(), [PicturedRow(Row('<image>', '1'), (b'x',))], V
      ),
      "a file that begins with b'x' is no picture",
    ),
    (
      lambda: pictured_prompts.pixels([row('<image>', (56, 84))], V, 23, 2, 9),
      "the problem '<image>' has 1 pictures of 24 patches in 1 windows, more than 2 of "
      '23 in 9; make',
    ),
    (
      lambda: pictured_prompts.pixels([row('', (56, 56), (56, 56))], V, 99, 1, 9),
      'has 2 pictures of 32 patches in 2 windows, more than 1 of 99 in 9; make them',
    ),
  ],
)
def test_what_does_not_fit_is_refused(call, message):
  with pytest.raises(ValueError) as error:
    call()
  assert message in str(error.value)
  assert '\n' not in str(error.value)


def test_a_tokenizer_without_the_token_of_pictures():
  with pytest.raises(ValueError, match='no token 99, which stands for a picture'):
    pictured_prompts.encode(
      reader(), [row('Find')], dataclasses.replace(V, image_token=99)
    )
