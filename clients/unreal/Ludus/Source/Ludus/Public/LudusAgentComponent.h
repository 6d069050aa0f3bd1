// An agent of a level that a Ludus server trains or plays. Derive from it in C++, implement Observe and Act, and add it to an actor.
//
// Every DecisionPeriod ticks it sends an observation with the reward since the one before. Requests run on another thread; everything
// here runs in TickComponent on the game thread. The server may come, go and restart: the agent begins a new session.

#pragma once

#include "Components/ActorComponent.h"
#include "CoreMinimal.h"

#include "LudusAgentComponent.generated.h"

struct FLudusAgentState;

UCLASS(Abstract, ClassGroup = (Ludus))
class LUDUS_API ULudusAgentComponent : public UActorComponent
{
	GENERATED_BODY()

public:
	ULudusAgentComponent();

	/** Host of `ludus train` or `ludus serve`. The variable LUDUS_TOKEN of the environment is its token. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	FString Host = TEXT("127.0.0.1");

	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	int32 Port = 8000;

	/** Name of the model, if the server has several. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	FString Model;

	/** Common id of all sessions of one match; empty: a match of its own. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	FString Match;

	/** Side of the match that this agent plays. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	FString Side;

	/** 0: the most probable actions; 1: as in training; below 0: as the server is configured. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	float Temperature = -1.0f;

	/** Continuous numbers of an action, which come first. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	int32 Numbers = 0;

	/** Discrete choices of an action, after the numbers. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	int32 Choices = 1;

	/** Ticks from one decision to the next; the last action stays in force. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus", meta = (ClampMin = "1"))
	int32 DecisionPeriod = 5;

	/** Time in milliseconds after which a decision is given up. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus", meta = (ClampMin = "1"))
	int32 DeadlineMs = 5000;

	/** Stop the frame until the action is there. For training: every action belongs to the tick that was observed. */
	UPROPERTY(EditAnywhere, BlueprintReadWrite, Category = "Ludus")
	bool bWaitForActions = false;

	/** Add to the reward of the last action. */
	UFUNCTION(BlueprintCallable, Category = "Ludus")
	void AddReward(float Reward);

	/** End the episode in a terminal state: the agent has won, lost or died. */
	UFUNCTION(BlueprintCallable, Category = "Ludus")
	void EndEpisode();

	/** End the episode although it could go on, for example at a time limit. */
	UFUNCTION(BlueprintCallable, Category = "Ludus")
	void InterruptEpisode();

	/** Whether a session is open. */
	UFUNCTION(BlueprintPure, Category = "Ludus")
	bool IsConnected() const;

	/** Decisions that missed their deadline. */
	UFUNCTION(BlueprintPure, Category = "Ludus")
	int32 MissedDecisions() const;

	virtual void BeginPlay() override;
	virtual void EndPlay(const EEndPlayReason::Type EndPlayReason) override;
	virtual void TickComponent(float DeltaTime, ELevelTick TickType, FActorComponentTickFunction* ThisTickFunction) override;

protected:
	/** Append the numbers of the observation, in the order of GET /spec. */
	virtual void Observe(TArray<float>& Observation) {}

	/** Apply an action. */
	virtual void Act(const TArray<float>& Continuous, const TArray<int64>& Discrete) {}

	/** Append an entry for every option of the next decision, whether it is allowed; none: all are. */
	virtual void MaskActions(TArray<bool>& Allowed) {}

	/** Reset the level. Called before the first tick of every episode. */
	virtual void OnEpisodeBegin() {}

	/** A request failed (the reason), or succeeded again (empty). */
	virtual void OnConnectionChanged(const FString& Failure);

private:
	void Finish(bool bTerminated);
	void BeginEpisode();
	void DecideIfReady();
	void TakeAction();
	void Report();

	TSharedPtr<FLudusAgentState> State;
};
