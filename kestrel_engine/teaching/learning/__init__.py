"""How an adapter is fitted: batches, the differentiable decoder, losses and the optimiser's loop."""
