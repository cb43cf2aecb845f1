"""What an operator of runs needs: a page, metrics, bills, advice and simulations, all from records."""
