"""Reproduction of the papers' numbers: `torchcaps reproduce` trains rows of their tables, `make results` shows ours.

plan        which rows, with which seeds, in which order
queue       trains them one after the other, each in a process that runs `work`
results     results.csv, the numbers that we got
report      the tables of docs from results.csv
"""
