"""What the environment must say before JAX compiles for a TPU that is not attached."""

# What libtpu wants on a host without a TPU; the two efforts halve the time to compile
# and leave the memory as it is.
PLANNING = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
  'JAX_EXEC_TIME_OPTIMIZATION_EFFORT': '-1',
  'JAX_MEMORY_FITTING_EFFORT': '-1',
}
