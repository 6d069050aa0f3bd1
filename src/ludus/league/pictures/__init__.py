"""Pictures of a league: payoff matrix, rating curves, family tree; as PNG files and in TensorBoard."""
