"""Data sets of problems with verifiable answers, as tensorflow-datasets builders."""
