#pragma once

#include "CoreMinimal.h"

namespace EEndPlayReason
{
enum Type { Destroyed, LevelTransition, EndPlayInEditor, RemovedFromWorld, Quit };
}

enum ELevelTick { LEVELTICK_All };

struct FActorComponentTickFunction
{
	bool bCanEverTick = false;
};

class UActorComponent
{
public:
	virtual ~UActorComponent() = default;
	virtual void BeginPlay() {}
	virtual void EndPlay(const EEndPlayReason::Type) {}
	virtual void TickComponent(float, ELevelTick, FActorComponentTickFunction*) {}

	FActorComponentTickFunction PrimaryComponentTick;
};
