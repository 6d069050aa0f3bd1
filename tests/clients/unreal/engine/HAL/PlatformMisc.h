#pragma once

#include "CoreMinimal.h"

struct FPlatformMisc
{
	static FString GetEnvironmentVariable(const TCHAR* Name)
	{
		const char* Value = std::getenv(Name);
		return FString(Value ? Value : "");
	}
};
