"""Fits of single parameters: noise, links, tenants, incast, work after the collective, published tables."""
