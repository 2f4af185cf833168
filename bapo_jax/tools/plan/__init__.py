"""In: a config and a TPU topology that need not be attached.
Out: tables of memory, collectives and lower bounds on time, and what would fit.
Read hlo, roofline, programs, then plan.
"""
