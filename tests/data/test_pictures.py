"""Pictures become the patches that transformers makes of them, or are refused."""

import io

import numpy as np
import PIL.Image
import pytest
from pictured import SEEING, problems
from refusals import sentence_of

from bapo_jax.data import gallery, pictures
from bapo_jax.data.gallery import Capacity
from bapo_jax.models.vision.spec import VisionSpec

V = VisionSpec(
  width=16, layers=1, heads=2, ffn=16, out=16, full_layers=(0,), image_token=5
)
SMALL = VisionSpec(
  **vars(V) | {'patch': 7, 'least_pixels': 28 * 28, 'most_pixels': 84 * 84}
)


def drawn(height, width, seed=0):
  """A picture with smooth and sharp parts."""
  rng = np.random.default_rng(seed)
  y, x = np.mgrid[:height, :width]
  wave = 127 + 90 * np.sin(x[..., None] / (3 + np.arange(3)) + y[..., None] / 7)
  noise = rng.integers(0, 38, (height, width, 3))
  pixels = (wave + noise).astype(np.uint8)
  pixels[height // 3 : height // 2] = 0
  return PIL.Image.fromarray(pixels)


def saved(picture, kind='PNG', **options):
  file = io.BytesIO()
  picture.save(file, kind, **options)
  return file.getvalue()


def sizes():
  """25 sizes: both limits, strips, odd numbers, halves that round to even."""
  rng = np.random.default_rng(0)
  fixed = [(1, 1), (14, 14), (42, 70), (56, 84), (57, 55), (28, 1400), (1400, 28)]
  fixed += [(448, 448), (1, 200), (200, 1), (1100, 1000), (900, 1400), (29, 2800)]
  return fixed + [tuple(map(int, rng.integers(2, 400, 2))) for _ in range(12)]


def theirs(v):
  from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as module

  size = {'shortest_edge': v.least_pixels, 'longest_edge': v.most_pixels}
  return module.Qwen2VLImageProcessorPil(
    patch_size=v.patch, merge_size=v.merge, size=size
  )


def frames(found, v):
  """Their patches without their normalisation, frame by frame: [frames, Z, E]."""
  x = np.asarray(found['pixel_values'])
  x = x.reshape(len(x), 3, v.frames, v.patch, v.patch).transpose(2, 0, 1, 3, 4)
  mean, std = (np.reshape(x, (1, 1, 3, 1, 1)) for x in (v.mean, v.std))
  return np.rint(255 * (x * std + mean)).reshape(v.frames, -1, v.numbers)


@pytest.mark.parametrize('v', [V, SMALL], ids=['published', 'small'])
def test_sizes_have_the_patches_of_transformers(v):
  processor = theirs(v)
  for seed, (height, width) in enumerate(sizes()):
    picture = drawn(height, width, seed)
    found = pictures.patches(picture, v)
    wanted = processor([picture])
    assert [1, *found.grid] == wanted['image_grid_thw'][0].tolist(), (height, width)
    assert found.pixels_ZE.dtype == np.uint8
    # Pictures that are not resized are equal to the byte.
    exact = found.grid == (height / v.patch, width / v.patch)
    for frame_ZE in frames(wanted, v):
      assert np.abs(frame_ZE - found.pixels_ZE).max() <= 1 - exact, (height, width)


def test_patches_are_counted_without_being_made():
  for height, width in [*sizes()[:10], (3, 90)]:
    data = saved(drawn(height, width))
    assert pictures.grid(data, SMALL) == pictures.patches(pictures.read(data), SMALL)[1]
  exif = PIL.Image.Exif()
  exif[0x0112] = 6  # turned by a quarter
  turned = saved(drawn(28, 56), 'JPEG', exif=exif.tobytes())
  assert pictures.read(turned).size == (28, 56)
  assert pictures.grid(turned, SMALL) == (8, 4)


def test_what_is_transparent_lies_on_white():
  pixels = np.zeros((4, 4, 4), np.uint8)
  pixels[0, 0] = 10, 20, 30, 255
  read = np.asarray(pictures.read(saved(PIL.Image.fromarray(pixels, 'RGBA'))))
  assert read[0, 0].tolist() == [10, 20, 30]
  assert (read.reshape(-1, 3)[1:] == 255).all()


def test_grey_of_16_bits_is_scaled():
  # 257 steps of 16 bits are one of eight: 65535 = 255 * 257.
  values = np.array([[0, 257, 128 * 257 + 100], [65535, 65000, 128]], np.uint16)
  expected = np.array([[0, 1, 128], [255, 253, 0]])
  data = saved(PIL.Image.fromarray(values))
  assert PIL.Image.open(io.BytesIO(data)).mode == 'I;16'
  np.testing.assert_array_equal(pictures.read(data), expected[..., None].repeat(3, 2))


def test_a_picture_of_another_format_is_refused():
  data = saved(drawn(9, 9), 'TIFF')
  assert "a file that starts with b'II*" in sentence_of(pictures.read, data)


# --- the gallery: pictures by the ids of problems -------------------------------------

TOWER = SEEING.vision


def test_every_problem_has_its_own_pictures_and_no_others():
  _, held = problems()
  ids = [4, -1, 1, 2, 1]
  found = held.of(ids)
  assert found.pixels_PZE.shape == (5, held.room.patches, TOWER.numbers)
  assert found.grid_PI2.shape == (5, 2, 2) and held.room == Capacity(32, 2, 3)
  assert found.grid_PI2[:, :, 0].tolist() == [[2, 0], [0, 0], [2, 6], [0, 0], [2, 6]]
  for p, i in enumerate(ids):
    if i < 0:
      assert not found.pixels_PZE[p].any()
      continue
    patches_ZE = np.zeros((held.room.patches, TOWER.numbers), np.uint8)
    if files := held.rows[i].pictures:
      decoded = [pictures.patches(pictures.read(x), TOWER).pixels_ZE for x in files]
      patches_ZE[: sum(map(len, decoded))] = np.concatenate(decoded)
    np.testing.assert_array_equal(found.pixels_PZE[p], patches_ZE)


def test_the_capacity_is_that_of_the_largest_in_whole_windows():
  # 2 x 4 + 3 x 4 = 20 patches are more than one window of 16 and take two; three small
  # pictures have three windows.
  assert gallery.capacity([[(2, 4), (3, 4)], [(2, 2)] * 3, []], TOWER) == (32, 3, 3)
  assert gallery.capacity([[], []], TOWER) == (0, 0, 0)
