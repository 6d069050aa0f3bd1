"""A duel in ViZDoom's `multi_duel` as a game process: two engines in lock-step, each camp an actor over HTTP or a script.

What a camp's actor is told and asked, in the words of `GET /spec`:

    observation_space   {type: Box, shape: [84, 84, 1], dtype: uint8, low: 0, high: 255}     its own view, grey
    action_space        {type: Discrete, n: 6}     nothing, left, right; and the same three while firing

Bodies are msgpack, the picture as raw bytes. The reward is the change of (own frags − the other's): the duel is zero-sum.
A player that lies dead is not asked; what happens meanwhile is told with its next tick.
"""
