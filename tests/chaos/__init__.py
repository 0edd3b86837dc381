"""The proof: real beats and workers that are hurt for minutes, a history, and its judge.

`python -m tests.chaos --seed N` plays a plan of faults and ends with one line. Read `history`
(what is written down), `plan` (what goes wrong), `checker` (what has to hold), `controls`
(what the checker has to catch), in this order.
"""
