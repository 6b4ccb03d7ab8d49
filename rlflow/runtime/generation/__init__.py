"""Generation by all engines of a role: which engine generates which sample, and when.

1. A prompt becomes ``group_size`` samples. ``engine_group.EngineGroup`` starts a generation on the engines that have
   the current weights, and afterwards replaces engines that have failed.
2. ``dispatcher.dispatch`` sends the engines the numbers of their samples; the prompts travel once. An engine reports
   when some samples are finished, or after a second.
3. ``scheduler.Scheduler`` decides, without threads or a clock, which samples an engine starts, preempts or resumes.
   Its order follows from the expected lengths of the groups' responses (``length_model``).
4. A preempted sample is a partial rollout, which any engine can resume (``partial_rollouts``). Its tokens stay in the
   object store; this process only has references.
5. While engines still generate, finished samples stream to nodes that work on samples or groups (``early_results``,
   ``streaming_nodes``).
6. The rollouts are returned in the order of their keys.

Two kinds of steps use this differently. With dynamic sampling, ``resampling`` generates in rounds until enough prompts
have responses with different rewards. With ``overlap``, ``ahead`` generates later steps while a step trains.
"""
