"""Hosts and GPUs, as Ray and nvidia-smi report them.

``connection`` joins a running Ray or starts one, ``hosts`` lists Ray's hosts and what uses their GPUs, ``binding``
matches them to a plan, ``machine`` describes this machine, ``services`` tells whether Ray and its hosts still answer,
``signals`` keeps Ray out of the signals that a run gets, and ``probes`` runs checks that may hang in processes of their
own.
"""
