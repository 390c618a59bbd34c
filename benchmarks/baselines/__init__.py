"""The baselines that autopar is measured against."""
