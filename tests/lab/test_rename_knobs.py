"""A recorded config of older versions gets the names that its knobs have today."""

import json

from bapo_jax.algorithms.clip import Fixed
from bapo_jax.algorithms.loss import Decoupled
from bapo_jax.runtime.workdir import read_config
from bapo_jax.training import config as config_lib
from lab import rename_knobs

INF = float('inf')
# As older versions wrote it: every rule has a section of its own.
OLD = {
  'steps': 80,
  'sampler': {},
  'clip': {
    'rule': 'fixed',
    'own': {},
    'unclipped': {},
    'fixed': {'low': 0.7, 'high': 1.3, 'dual': INF},
    'balanced': {'target': 0.42, 'low': [0.6, 0.9], 'dual': INF},
  },
  'loss': {
    'rule': 'decoupled',
    'aggregate': 'sequence',
    'kl': 0.5,
    'kl_direction': 'squared',
    'clipped': {'limit': INF},
    'decoupled': {'cap': 3.0, 'beyond_cap': 'mask'},
  },
  'batch': {
    'rule': 'replay',
    'own': {},
    'max_extra_rounds': 4,
    'weights': {'fresh': 1.0, 'reevaluated': 1.0, 'reused': 0.5},
    'replay': {'replay_ratio': 3},
    'adapted': {},
  },
  'buffer': {
    'capacity': 128,
    'thresholds': {
      'rule': 'moving',
      'fixed': {'hard': 0.125, 'reusable': [0.125, 0.625]},
      'moving': {'hard': 0.25, 'low': [0.375, 0.125], 'high': [0.875, 0.625]},
    },
  },
  'rewards': {
    'rule': 'aime',
    'own': {},
    'shaping': {
      'rule': 'standard',
      'own': {},
      'format_bonus': 0.0,
      'truncated': 'wrong',
    },
  },
  'problems': {'source': 'synthetic', 'own': {}, 'pair': {'hard': 0.5}},
}


def test_the_config_of_an_older_run_is_read_again(tmp_path, monkeypatch):
  (tmp_path / 'config.json').write_text(json.dumps(OLD))
  monkeypatch.setattr('sys.argv', ['rename_knobs', str(tmp_path)])
  for _ in range(2):  # a second time changes nothing
    rename_knobs.main()
    config = config_lib.from_json(read_config(str(tmp_path)))
    assert config.clip == Fixed(low=0.7, high=1.3)
    assert config.loss == Decoupled(
      cap=3.0, beyond_cap='mask', aggregate='sequence', kl=0.5, kl_direction='squared'
    )
    assert (config.batch.replay_ratio, config.batch.max_extra_rounds) == (3, 4)
    assert config.batch.weights.reused == 0.5
    thresholds = config.buffer.thresholds
    assert (thresholds.hard, thresholds.low) == (0.25, (0.375, 0.125))
    assert config.rewards.shaping.truncated == 'wrong'
    assert config.problems.pair.hard == 0.5


def test_the_knobs_of_a_custom_rule_are_merged():
  old = {
    'loss': {'rule': 'my.py:mine', 'own': {'tau': 0.5}, 'kl': 0.0, 'tis': {'cap': 2.0}},
    'rewards': {'rule': 'my.py:score', 'own': {'per_token': 0.1}},
    'problems': {'source': 'my.py:rows', 'own': {'count': 3}},
  }
  assert rename_knobs.renamed(old) == {
    'loss': {'rule': 'my.py:mine', 'tau': 0.5, 'kl': 0.0},
    'rewards': {'rule': 'my.py:score', 'custom': {'per_token': 0.1}},
    'problems': {'source': 'my.py:rows', 'custom': {'count': 3}},
  }
