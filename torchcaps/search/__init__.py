"""The search for good values of a recipe, of `torchcaps search`: many trainings, its trials, with Optuna or Ray.

    plan.py         what is searched, and the folder of the search
    trial.py        one training, which reports its metric after every validation
    with_optuna.py  trials one after the other; Optuna chooses their values and ends bad ones
    with_ray.py     trials at the same time, on one machine or many; Ray Tune runs them and ends bad ones
    results.py      what a search leaves: the table of its trials, the best recipe
    picture.py      and their picture

Both write a file for each trial, which says all that is known of it. A search that was stopped or killed begins with
these files: its finished trials are not repeated, and the others continue from their checkpoints.
"""
