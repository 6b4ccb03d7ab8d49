"""Agents: programs that call the model of a role as often as they like, and say what came of it.

1. A node ``agent`` asks its engine for *episodes*, one for each sample. Beside the engine run an *endpoint*, which
   speaks the protocols of model services, and workers, in which the agents run.
2. The engine records every call: the tokens of its prompt, those that were sampled, their logprobs and versions. An
   agent only says what the episode was worth. Tokens are never encoded again.
3. The calls of an episode become segments of one rollout.
"""
