"""Equal tuning: the same number of settings of each method, and the best of them compared."""
