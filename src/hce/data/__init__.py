"""Read documents, queries and judgments from common file formats."""
