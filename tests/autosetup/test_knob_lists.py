"""The first screen and the report show the rules in force and every changed knob."""

from runs import plain

from bapo_jax.autosetup import knob_lists
from bapo_jax.training.config import parse

DAPO = {'batch.rule': 'learnable_only', 'clip.rule': 'fixed', 'clip.high': 1.28}


def test_rules_are_shown_with_the_knobs_that_they_use():
  assert knob_lists.in_force(parse(plain(**DAPO))) == {
    'batch': 'learnable_only: weights.fresh 1.0, max_extra_rounds 2',
    'advantage': 'group_relative',
    'clip': 'fixed: low 0.8, high 1.28, dual inf',
    'loss': 'clipped: aggregate token, kl 0.0, limit inf',
  }
  shown = knob_lists.in_force(parse(plain(**{'batch.rule': 'adapted'})))
  assert shown['buffer'].startswith('capacity 256, max_off_policy_steps 3, max_reuse 3')
  assert shown['buffer'].endswith(
    'thresholds.rule fixed, thresholds.hard 0.125, thresholds.reusable (0.125, 0.625)'
  )
  assert shown['clip'].startswith(
    'balanced: target 0.42, low (0.6, 0.9), high (1.2, 3.0), low_step 0.02'
  )


def test_knobs_of_an_own_rule_are_shown(tmp_path):
  text = (
    'def mine(logp_BT, batch, find, *, tau=0.5):\n  return logp_BT, find(logp_BT)\n'
  )
  (tmp_path / 'own.py').write_text(text)
  place = f'{tmp_path}/own.py:mine'
  config = parse(plain(**{'loss.rule': place, 'loss.tau': 0.25}))
  assert knob_lists.in_force(config)['loss'] == (
    f'{place}: aggregate token, kl 0.0, tau 0.25'
  )


def test_the_first_screen_lists_changed_knobs_and_those_without_an_effect():
  knobs = {'lora.alpha': 8.0, 'steps': 3, 'tokenizer.template': 'x{problem}'}
  lines = knob_lists.lines(parse(plain(**knobs)))
  *_, changed, idle = lines.splitlines()
  assert changed == (
    "  changed    steps=3, lora.alpha=8.0, tokenizer.template='x{problem}'"
  )
  assert idle == '  no effect  lora.alpha=8.0 (lora.rank=0)'
  *_, flush = knob_lists.lines(parse(plain(**knobs)), indent='').splitlines()
  assert flush == idle.removeprefix('  ')
  switched = knob_lists.lines(parse(plain(**knobs, **{'lora.rank': 2})))
  assert 'no effect' not in switched and 'lora.rank=2' in switched
  assert 'changed' not in knob_lists.lines(parse(plain()))
