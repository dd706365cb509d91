"""Synthetic tasks: rows made by a formula, with exact answers.

draws       random numbers as a formula
task        what a task is
hops, recall, sequences, groups, brackets      the tasks
source      all of them, their loader and their vocabulary
"""
