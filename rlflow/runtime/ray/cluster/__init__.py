"""Hosts and GPUs, as Ray and nvidia-smi report them.

``connection`` joins a running Ray or starts one, ``hosts`` lists Ray's hosts and what uses their GPUs, ``free_gpus``
those that nothing uses, ``binding`` matches them to a plan, ``machine`` lists the GPUs of this machine, ``services``
tells whether Ray and its hosts still answer, and ``signals`` keeps Ray out of the signals that a run gets.
"""
