"""In: a config and a TPU topology that need not be attached.
Out: tables of memory, collectives and lower bounds on time, and a batch that fits.
Read hlo, roofline, programs, tables, hosts, search, then plan.
"""
