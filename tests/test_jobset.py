"""launch/gke/jobset.yaml has known fields, a pod per host, and the rule of restarts.

The schema is written by hand, after the definitions of JobSet and of Kubernetes.
"""

import json
import pathlib

import jsonschema
import pytest
import yaml

LAUNCH = pathlib.Path(__file__).parents[1] / 'launch'


def closed(required, **properties):
  """The schema of an object: these fields, the required ones among them, no other."""
  return {
    'type': 'object',
    'properties': properties,
    'required': required.split(),
    'additionalProperties': False,
  }


def each(schema, least=1):
  """The schema of a list."""
  return {'type': 'array', 'items': schema, 'minItems': least}


NAME = {'type': 'string', 'pattern': r'^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$'}
TEXT, COUNT = {'type': 'string', 'minLength': 1}, {'type': 'integer', 'minimum': 0}
LABELS = {'type': 'object', 'additionalProperties': {'type': 'string'}}
CHIPS = closed('google.com/tpu', **{'google.com/tpu': {'enum': [1, 4, 8]}})
CONTAINER = closed(
  'name image command',
  name=NAME,
  image=TEXT,
  command=each(TEXT),
  args=each(TEXT),
  ports=each(closed('containerPort', containerPort={**COUNT, 'maximum': 65535})),
  resources=closed('requests limits', requests=CHIPS, limits=CHIPS),
  volumeMounts=each(closed('name mountPath', name=NAME, mountPath={'pattern': '^/'})),
)
POD = closed(
  'restartPolicy containers',
  # Kubernetes: a Job with a podFailurePolicy has pods that are never restarted.
  restartPolicy={'const': 'Never'},
  terminationGracePeriodSeconds=COUNT,
  nodeSelector=LABELS,
  containers=each(CONTAINER),
  volumes=each(
    closed(
      'name persistentVolumeClaim',
      name=NAME,
      persistentVolumeClaim=closed('claimName', claimName=NAME),
    )
  ),
)
EXITS = closed(
  'operator values',
  containerName=NAME,
  operator={'enum': ['In', 'NotIn']},
  values=each({'type': 'integer', 'minimum': 1, 'maximum': 255}),
)
FINAL = closed('action', action={'enum': ['FailJob', 'Ignore']}, onExitCodes=EXITS)
JOB = closed(
  'parallelism completions template',
  parallelism=COUNT,
  completions=COUNT,
  completionMode={'enum': ['Indexed', 'NonIndexed']},
  backoffLimit=COUNT,
  podFailurePolicy=closed('rules', rules=each(FINAL)),
  template=closed('spec', metadata={'type': 'object'}, spec=POD),
)
ACTIONS = ['FailJobSet', 'RestartJobSet', 'RestartJobSetAndIgnoreMaxRestarts']
JOBSET = closed(
  'apiVersion kind metadata spec',
  apiVersion={'const': 'jobset.x-k8s.io/v1alpha2'},
  kind={'const': 'JobSet'},
  metadata=closed('name', name=NAME, annotations=LABELS),
  spec=closed(
    'replicatedJobs',
    failurePolicy=closed(
      'maxRestarts',
      maxRestarts=COUNT,
      restartStrategy={'enum': ['Recreate', 'BlockingRecreate']},
      rules=each(
        closed(
          'name action',
          name={'type': 'string', 'pattern': '^[A-Za-z]'},
          action={'enum': ACTIONS},
          onJobFailureReasons=each({'enum': ['PodFailurePolicy']}),
        )
      ),
    ),
    replicatedJobs=each(
      closed(
        'name template', name=NAME, replicas=COUNT, template=closed('spec', spec=JOB)
      )
    ),
  ),
)


@pytest.fixture
def jobset():
  return yaml.safe_load((LAUNCH / 'gke' / 'jobset.yaml').read_text())


def test_the_jobset_has_the_fields_that_kubernetes_knows(jobset):
  jsonschema.Draft202012Validator(JOBSET).validate(jobset)
  for path, value in {
    ('spec', 'replicatedJobs', 0, 'template', 'spec', 'parallelism'): '16',
    ('spec', 'failurePolicy', 'maxRestart'): 3,
    ('metadata', 'name'): 'bapo_jax',
  }.items():
    wrong = json.loads(json.dumps(jobset))
    inner = wrong
    for key in path[:-1]:
      inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
      jsonschema.Draft202012Validator(JOBSET).validate(wrong)


def test_the_jobset_has_one_pod_per_host_and_the_rule_of_restarts(jobset):
  job = jobset['spec']['replicatedJobs'][0]['template']['spec']
  pod = job['template']['spec']
  (container,) = pod['containers']
  x, y, z = map(
    int, pod['nodeSelector']['cloud.google.com/gke-tpu-topology'].split('x')
  )
  chips = container['resources']['limits']['google.com/tpu']
  assert job['parallelism'] == job['completions'] == x * y * z // chips
  assert container['resources']['requests'] == container['resources']['limits']
  assert job['backoffLimit'] == 0
  (rule,) = job['podFailurePolicy']['rules']
  assert rule['onExitCodes']['containerName'] == container['name']
  final = {0, *rule['onExitCodes']['values']}
  text = (LAUNCH / 'restarts.sh').read_text()
  assert f'case $status in {" | ".join(map(str, sorted(final)))})' in text
  mounted = {mount['name'] for mount in container['volumeMounts']}
  assert mounted == {volume['name'] for volume in pod['volumes']}


def test_the_image_has_what_a_run_reads():
  lines = (LAUNCH / 'gke' / 'Dockerfile').read_text().splitlines()
  copied = [line.split()[1:-1] for line in lines if line.startswith('COPY ')]
  there = {name for names in copied for name in names}
  assert all((LAUNCH.parent / name).exists() for name in there)
  assert {'bapo_jax', 'configs', 'constraints.txt', 'requirements-tpu.txt'} <= there
  wanted = (LAUNCH.parent / 'requirements-tpu.txt').read_text().splitlines()
  assert {line.split()[1] for line in wanted if line.startswith('-r ')} <= there
