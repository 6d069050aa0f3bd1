"""Game process of a duel in ViZDoom's `multi_duel`: two engines in lock-step; an actor over HTTP or a bot plays each camp.

Spaces of an actor, as in `GET /spec`:

    observation_space   {type: Box, shape: [84, 84, 1], dtype: uint8, low: 0, high: 255}     its own view, grey
    action_space        {type: Discrete, n: 6}     nothing, left, right; and the same three while firing

Bodies are msgpack with the screen as raw bytes. The reward is the change of (own frags − enemy frags): the duel is zero-sum.
Dead players are not asked; rewards of that time come with the next tick.
"""
