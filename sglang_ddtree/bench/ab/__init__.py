"""The A/B benchmark: any arms, any load, with a result that says whether its figures may be compared."""
