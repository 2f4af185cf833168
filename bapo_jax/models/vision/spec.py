"""Defines the sizes of a vision tower and its parameters: shapes and initialisers.

The tower is that of Qwen2.5-VL (Bai et al., 2025, arXiv:2502.13923); tower.py runs it.
`transformer.describe` includes its parameters below `vision/`.
"""

import dataclasses

Initialiser = tuple[tuple[int, ...], float | str]  # (shape, scale)
CHANNELS = 3  # red, green, blue


@dataclasses.dataclass(frozen=True)
class VisionSpec:
  """Sizes and options of a vision tower."""

  width: int
  layers: int
  heads: int
  ffn: int
  out: int  # width of the language model
  full_layers: tuple[int, ...]  # layers that attend within whole pictures
  image_token: int  # the token that stands for a merged patch in a text
  window: int = 112  # pixels along each side of a window
  patch: int = 14  # pixels along each side of a patch
  frames: int = 2  # frames per patch of a video; a picture is repeated
  merge: int = 2  # patches along each side of a merged patch
  mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)  # of CLIP
  std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)  # of CLIP
  least_pixels: int = 56 * 56  # a smaller picture is enlarged
  most_pixels: int = 28 * 28 * 1280  # a larger picture is reduced
  rope_theta: float = 10_000.0
  norm_eps: float = 1e-6

  @property
  def head_width(self) -> int:
    """Returns C, the width of an attention head of the tower."""
    return self.width // self.heads

  @property
  def numbers(self) -> int:
    """Returns E, the number of values of a patch in one frame."""
    return CHANNELS * self.patch**2

  @property
  def window_side(self) -> int:
    """Returns the number of merged patches along each side of a window."""
    return self.window // (self.merge * self.patch)

  @property
  def window_patches(self) -> int:
    """Returns the number of patches in a full window."""
    return (self.window_side * self.merge) ** 2


def describe(v: VisionSpec) -> dict[str, Initialiser]:
  """Lists the parameters: path -> (shape, scale), as in `transformer.describe`."""
  D = v.width
  F = v.ffn
  L = v.layers
  H = v.heads
  C = v.head_width
  X = v.merge**2 * D  # the merger's input: merge * merge patches
  inner = D**-0.5
  outer = (2 * L) ** -0.5
  f = v.frames
  p = v.patch
  return {
    'patch': ((CHANNELS, f, p, p, D), (f * v.numbers) ** -0.5),
    'layers/attn_norm': ((L, D), 'ones'),
    'layers/qkv': ((L, D, 3, H, C), inner),
    'layers/qkv_bias': ((L, 3, H, C), 'zeros'),
    'layers/o': ((L, H, C, D), outer * D**-0.5),
    'layers/o_bias': ((L, D), 'zeros'),
    'layers/mlp_norm': ((L, D), 'ones'),
    'layers/gate': ((L, D, F), inner),
    'layers/gate_bias': ((L, F), 'zeros'),
    'layers/up': ((L, D, F), inner),
    'layers/up_bias': ((L, F), 'zeros'),
    'layers/down': ((L, F, D), outer * F**-0.5),
    'layers/down_bias': ((L, D), 'zeros'),
    'merger_norm': ((D,), 'ones'),
    'merger_in': ((X, X), X**-0.5),
    'merger_in_bias': ((X,), 'zeros'),
    'merger_out': ((X, v.out), X**-0.5),
    'merger_out_bias': ((v.out,), 'zeros'),
  }
