"""Measure the structure of a checkout: files of one run, loose files, import circles, names, copies, sizes.

python -m benchmarks.structure --root PATH
"""
