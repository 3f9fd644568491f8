"""The search for good values of a recipe, of `torchcaps search`: many trainings, the trials of a study of Optuna.

    plan.py     what is searched: the head `search` of a recipe, and checks before the first trial
    study.py    the study, in a storage of Optuna's, and its trials, each a training that reports its metric
    results.py  what a search leaves: the table of its trials, their pictures, the best recipe

Several processes, on one machine or on many, can work on one study: each takes trials that no other process works on. A
trial that was stopped or killed continues from its checkpoint.
"""
