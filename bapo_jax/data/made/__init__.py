"""Problems made from a seed: their texts, pictures, answers and worked solutions."""
