"""Held-out sets by name: what is a name, what is a path, and what is refused."""

import pytest

from bapo_jax.data import sets
from bapo_jax.training import config


@pytest.mark.parametrize(
  ('source', 'parsed'),
  [
    ('aime24=a.jsonl,aime25=b.jsonl', {'aime24': 'a.jsonl', 'aime25': 'b.jsonl'}),
    # A path without a name continues its set, and a path may have further =.
    ('x=a.jsonl,b.csv,y-_Z=lr=1.json', {'x': 'a.jsonl,b.csv', 'y-_Z': 'lr=1.json'}),
    ('x=hub:owner/name@v1:test', {'x': 'hub:owner/name@v1:test'}),
    # Without a name, as before.
    ('a.jsonl,b.parquet', {'': 'a.jsonl,b.parquet'}),
    ('runs/lr=1/a.jsonl,b.jsonl', {'': 'runs/lr=1/a.jsonl,b.jsonl'}),
    ('hub:owner/name:a=b', {'': 'hub:owner/name:a=b'}),
    ('runs/lr=1/pairs.py:pairs', {'': 'runs/lr=1/pairs.py:pairs'}),
  ],
)
def test_a_name_precedes_the_first_equals_sign(source, parsed):
  assert sets.parse(source) == parsed
  assert [*sets.parse(source)] == [*parsed]  # in their order


def test_a_path_that_exists_has_no_name(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  for name in ('lr=1.jsonl', 'a=1,b=2.jsonl', 'x=y.py'):
    (tmp_path / name).write_text('')
  for source in ('lr=1.jsonl', 'a=1,b=2.jsonl', 'c.jsonl,lr=1.jsonl', 'x=y.py:rows'):
    assert sets.parse(source) == {'': source}
  assert sets.parse('a=c.jsonl,lr=1.jsonl') == {'a': 'c.jsonl,lr=1.jsonl'}
  assert sets.parse('a=lr=1.jsonl') == {'a': 'lr=1.jsonl'}


def test_a_home_directory_is_written_out(monkeypatch):
  monkeypatch.setenv('HOME', '/home/me')
  assert sets.parse('x=~/a.jsonl,y=b.jsonl')['x'] == '/home/me/a.jsonl'


@pytest.mark.parametrize(
  ('source', 'sentence'),
  [
    (
      '=a.jsonl',
      "test_source==a.jsonl: '' cannot name a set; use letters, digits, _ and",
    ),
    (
      'aime 24=a.jsonl',
      "'aime 24' cannot name a set; use letters, digits, _ and -, as in",
    ),
    ('é=a.jsonl', "'é' cannot name a set"),
    (
      'x=a.jsonl,x=b.jsonl',
      'the name x belongs to another set or metric already; choose',
    ),
    ('x=a.jsonl,stderr=b.jsonl', 'the name stderr belongs to another set or metric'),
    ('a.jsonl,x=b.jsonl', "a.jsonl precedes the first name, 'x'; name every set, or"),
    ('x=,y=b.jsonl', 'the set x is empty; write x=file.jsonl'),
    (
      'x=examples/pairs.py:pairs',
      'x is a function, which cannot be a named set; write',
    ),
    (
      'gs://bucket/a.jsonl',
      'problems.test_source=gs://bucket/a.jsonl is not a path on',
    ),
  ],
)
def test_a_wrong_name_is_refused_with_the_config(source, sentence):
  changes = {'problems.source': 'a.jsonl', 'problems.test_source': source}
  with pytest.raises(ValueError, match=r'^problems\.test_source=') as error:
    config.compose({}, changes)
  assert sentence in str(error.value)
