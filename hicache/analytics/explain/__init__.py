"""Why a prompt misses: how far each tier has it, and what each page behind that is missed for."""
